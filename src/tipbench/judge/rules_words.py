"""Word lists of the rules judge: English only, and independent of any persona."""

from __future__ import annotations


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


# Function words: never hooks, and used to detect English.
FUNCTION = _set(
    "a about above across after again against all along also always am an and any anyone are around as at away "
    "back be because been before being below beside between both but by can could did do does doing don't done "
    "down during each either else enough ever every everyone few for from get give go had has have having he her "
    "here hers herself him himself his how i i'm if in instead into is isn't it it's its itself just least less "
    "let like made make many may me might more most much must my near need never no nor not nothing now of off "
    "often on once one only onto or other our out over own per perhaps please put quite rather really same see "
    "seem she should since so some something soon still such take than that that's the their them then there "
    "these they thing things this those though through till to today together too toward towards two under until "
    "up upon us use very want was way we well were what when where whether which while who whole whom whose why "
    "will with within without won't would yet you you're you've your yours yourself"
)

# Common nouns and verbs: half weight, because alone they do not identify a task or routine.
COMMON = _set(
    "afternoon ask begin bit book break breaks busy change check class clear day days decision detail early email "
    "end evening find finish first free fresh friend good half help hold home hour house idea important job keep "
    "kind last late leave life line list long look mail make mark matter meeting message minute minutes moment "
    "monday month morning move name new next night note notes number online open order pack page paper part "
    "people permission phone place plain plan point quarter quiet read ready right ring room run second section "
    "send set shift short sit slow small sort stand start step steps stop table talk team tell text thank third "
    "three tidy time tool top turn voice walk watch week word words work works write year"
)

# Visible physical first steps.
STEP_VERBS = _set(
    "attach boil brew carry circle clip close copy cross crumple cut dial draw drink drop empty fetch fill fold "
    "forward grab hang highlight hit hold jot lay lift load lock log move mute open paste pick place plug point "
    "pour press print pull push put record rinse roll scan scribble set sharpen shut sip sit slide snap stack "
    "stand staple stretch strike stroll switch tap tape tear tick tie toss touch turn type unfold unplug unroll "
    "walk wash wipe wrap"
)

# Concrete actions without a specific first step.
ACTION_VERBS = _set(
    "add agree answer apply approve arrange ask assemble back begin block book breathe bring brush build buy "
    "calculate call cancel change charge chase check choose clean clear collect comb compare complete confirm "
    "contact continue cook count create cycle dash decide delete deliver describe dictate discuss divide do "
    "download draft dust eat edit email exercise explain file find finish fix follow gather give greet hand have "
    "inspect install invite jog label leave list listen mail make mark measure meet mend message mix name nap "
    "note offer order outline pack paint pay phone photograph pin play post practise prepare proofread publish "
    "read rearrange rebook refuse rehearse remove renew reorder repair repeat reply request reread reschedule "
    "rest return review revise ring run save say schedule scroll search select send separate share show sign sing "
    "sketch skim sleep sort speak spend split spread start stop submit sum swap sweep take talk tell text thank "
    "throw tidy trace transfer translate trim unpack unsubscribe update upload use vacuum visit wake warm watch "
    "water weigh work write zip"
)

# Vague directions: a goal without an action.
VAGUE_VERBS = _set(
    "accomplish achieve address adopt aim allocate anticipate approach attend automate avoid balance become boost "
    "break care catch coach commit communicate concentrate conquer conserve consider coordinate cultivate deal "
    "dedicate delegate determine develop eliminate engage enhance ensure establish evaluate excel explore face "
    "focus foster handle honor honour identify implement improve incorporate increase integrate invest involve "
    "keep know learn leverage limit look maintain manage master maximise maximize minimise minimize monetise "
    "monetize monitor navigate nurture observe optimise optimize organise organize overcome plan practice "
    "prioritise prioritize progress protect pursue reach recharge reduce reflect refocus relax remain remember "
    "resolve see seek simplify slow solve stay stick streamline strengthen strive structure support sustain "
    "tackle tend think track transform try understand unlock unwind utilise utilize value view"
)

# Imperatives that contain no action.
PEP_VERBS = _set(
    "appreciate be believe celebrate crush dare dream embrace enjoy feel forget go hope hustle imagine inspire "
    "kill let light live love own rise rock shine slay smash smile soar trust unleash win wish worry"
)

ORDERS = STEP_VERBS | ACTION_VERBS | VAGUE_VERBS | PEP_VERBS

# Verbs that depend on their object: "take a pen" is an action, "take care" is not.
LIGHT_VERBS = _set("bring create do find get give have keep make pay put set spend take use")
VAGUE_OBJECTS = _set(
    "action advantage attention balance best boundaries care change charge clarity control difference effort "
    "energy focus goal goals growth habit habits mental mind mindset momentum most opportunity organised "
    "organized priorities priority progress routine start started success sure thought time track"
)
STEP_PAIRS = frozenset({"look up", "get up", "get out", "go to"})
TIME_VERBS = _set("allocate block dedicate devote find reserve schedule set spend take use")  # "use the hour to …"

LEAD_INS = _set(
    "afterwards again also always and but finally first gently immediately instead it's just lastly maybe next "
    "now only or perhaps please quickly quietly second simply so then third time to today"
)
MODALS = _set("can could let's may might must shall should will would")
URGES = _set("advisable advised best decide have idea need opportunity recommended remember sure time try want")
NEGATIONS = _set("avoid can't cannot don't never no not quit stop without won't")

BE_HAVE = _set("am are be been can could did do does had has have is isn't may might must should was were will would")

# Words that tie an instruction to a moment.
MOMENTS = _set("after before beside between during once since until when whenever while")
TRIGGERS = _set("after as at before during from if in on once over right since when whenever while with")

LATER_DAYS = _phrases("""
tomorrow
next week
this weekend
at the weekend
next month
""")
LATER_TODAY = _phrases("""
tonight
this evening
in the evening
the night before
later today
later this
later on
when you are back
when you get back
when you're back
when you get home
after work
after your shift
after school
before bed
end of the day
""")
EVENING = 18  # hour; from then on, LATER_TODAY phrases mean now

HOUR_NAMES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
CALENDAR = _set(
    "april august december dr february friday january july june march may monday mr mrs ms november october saturday "
    "september sunday thursday tuesday wednesday"
)  # capitalised, but not names of people

# Parts of the day: first and last hour (24 h).
DAYPARTS = {
    "breakfast": (5, 10),
    "morning": (4, 12),
    "mornings": (4, 12),
    "noon": (11, 14),
    "midday": (11, 14),
    "lunch": (11, 15),
    "lunchtime": (11, 15),
    "afternoon": (12, 18),
    "afternoons": (12, 18),
    "evening": (17, 24),
    "evenings": (17, 24),
    "dinner": (17, 22),
    "supper": (17, 22),
    "tonight": (17, 24),
    "bedtime": (20, 24),
    "asleep": (19, 24),
}
HOURS = _set(
    "about afternoon afternoons evening evenings half midday morning mornings noon o'clock past quarter tonight"
)
MORNING_ONLY = _phrases("""
start your day
start the day
begin your day
begin the day
this morning
wake up
morning coffee
your breakfast
before breakfast
over breakfast
first thing in the morning
""")

# Unspecific objects, which leave the choice to the reader.
OPEN_OBJECTS = _phrases("""
most important task
your tasks
your task
a task
one task
the task
your goals
your priorities
something important
""")

STOPS = _set("stop stopping till until")
STOP_VERBS = _set("close drop end finish fold go hang leave lock log press put return save send shut stop tick unplug")
SIZES = _set("eight first five four half next nine one seven single six ten three top two")
UNITS = _set("hour hours min mins minute minutes sec second seconds secs")

# Related words, treated as equal: "ring" satisfies a preference for speaking.
FAMILIES = (
    _set("aloud call dictate phone ring say speak speaker speaking talk talking telephone voice"),
    _set("keyboard type typing"),
    _set("notebook paper pen pencil sheet slip"),
    _set("app application apps software"),
    _set("alarm countdown timer"),
    _set("framework methodology system"),
)

HYPE = _set(
    "amazing awesome babe beast blast boom brilliant champ champion conquer conquering crush crushed crushing "
    "dominate dream dreams epic excellent exciting fabulous fantastic favorite favourite fearless genius girl "
    "glorious glory goddess gorgeous greatness grind hero hustle incredible inspiring king legend legendary magic "
    "magical miracle ninja passion perfect phenomenal power powerful powerhouse queen rock rocks rockstar shine "
    "slay smash sparkle spectacular star stellar success successful super supercharge superhero superheroes "
    "superstar thrive thriving ultimate unleash unlock unstoppable victory warrior win winner winning wonderful "
    "wow yay"
)
JARGON = _set(
    "actionable agile bandwidth benchmark brand deliverable deliverables ecosystem efficiency empower framework "
    "growth holistic impactful implement incentivise kpi kpis leverage leveraging maximise maximize mindset "
    "monetise monetize optimal optimise optimising optimize optimizing pipeline pomodoro proactive proactively "
    "productive productivity roi scalable seamless seamlessly stakeholder stakeholders strategic strategies "
    "strategize streamline synergies synergy throughput utilise utilize workflow workflows"
)
SCOLD = _phrases("""
lazy
disgrace
disgraceful
shame
ashamed
pathetic
wasting time
waste time
waste your time
no excuse
no excuses
excuses
you failed
have failed
stop being
stop putting
how could you
what is wrong with you
unacceptable
irresponsible
get a grip
procrastinating again
""")
SLOGANS = _phrases("""
believe in yourself
best version of
better version of
trust the process
embrace the
never give up
never too late
dream big
not harder
is a journey
key to success
is the key
are the key
thief of time
inner strength
full potential
your potential
you can do anything
sky is the limit
keep pushing
keep going
make it happen
nothing can stop you
every great
great things
step at a time
secret to
lifeblood of
backbone of
seize the day
carpe diem
make every
head on
one day at a time
positive attitude
stay positive
make a difference
change your life
be yourself
is everything
""")
CHEERS = _phrases("""
you've got this
you got this
you can do it
great job
good job
keep it up
so easy
so good
so proud
way to go
go for it
let's go
let's do this
good luck
have fun
are fun
is fun
feels good
feels so good
feels great
""")
LECTURE = _phrases("""
it is essential
it's essential
essential to
is essential
is crucial
crucial to
is vital
vital to
one must
it is important
it's important
is important
important to
responsible
the mark of
wise
ensures
leads to
builds
knows that
know that
good for you
is good for
are bad for
is bad for
it is a must
should always
should never
""")
PRESSURE = _phrases("""
long enough
really should
really is
really need
do not forget
don't forget
well done
you deserve
as always
put it off
put this off
put off
no matter what
at last
must not
be sure
at all costs
proud of
urgent
urgently
right away
immediately
""")
STIFF = _phrases("""
it is advisable
it is recommended
it is suggested
it is necessary
it would be a good idea
it would be beneficial
it would be wise
it is a good idea
in order to
as soon as possible
make sure
take the opportunity
priority 1
priority 2
priority 3
priority 4
overdue by
due date
on your list for
has priority
is due in
high priority
low priority
throughout
in a timely manner
with regard to
is a task
complete the task
""")
